"""What `rda` does for a user, a module per subcommand."""
