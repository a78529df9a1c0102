"""The arguments of a call, described and checked: every error a caller can meet before anything runs."""
