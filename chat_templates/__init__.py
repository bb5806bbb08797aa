"""Training chat templates, one `.jinja` file per model family (package data)."""
