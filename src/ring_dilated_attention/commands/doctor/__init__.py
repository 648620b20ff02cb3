"""`rda doctor`: the versions, network interfaces and rates of a machine or cluster."""
