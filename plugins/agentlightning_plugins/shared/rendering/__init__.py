"""Results as text, tables, charts and pages: for the terminal, for Markdown files and for the web."""
