"""What clients may say and are told: schemas, errors, JSON in and out."""
