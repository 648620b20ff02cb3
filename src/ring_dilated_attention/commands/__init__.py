"""The subcommands of `rda`, each in a module or package of its own."""
