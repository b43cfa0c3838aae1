"""What the stores in SQL databases share: records as JSON, queries as SQL, callers who share a transaction."""
