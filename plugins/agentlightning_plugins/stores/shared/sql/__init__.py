"""Library of the SQL stores: records as JSON, queries as SQL, group commit."""
