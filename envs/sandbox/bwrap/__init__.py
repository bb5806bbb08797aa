"""The process behind a `LocalBackend` sandbox. It runs without site-packages: only the standard library here."""
