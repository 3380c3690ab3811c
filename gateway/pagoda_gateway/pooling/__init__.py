"""Requests to embedding and scoring models, for every API: texts to records, records to vectors and scores."""
