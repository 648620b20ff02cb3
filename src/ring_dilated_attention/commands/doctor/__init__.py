"""`rda doctor`: whether this machine or cluster is ready, and how fast it is."""
