"""What clients may send and what they receive: schemas, errors, JSON in and out."""
