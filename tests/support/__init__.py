"""Stand-ins that tests share. README.md says which to take."""
