"""The page that shows a run: what was played, token by token, while it goes on or as one file.

Nothing that is shown can be trusted: a model wrote it. The Python side gives data only (JSON, and images that were
decoded and encoded again); the page puts text in place as text, never as markup.
"""
