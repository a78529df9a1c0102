"""The arguments of a call, described and checked: every error raised before anything runs."""
