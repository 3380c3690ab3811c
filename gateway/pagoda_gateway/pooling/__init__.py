"""What is asked of models that read: texts to records, records to vectors and scores, whatever API asked."""
