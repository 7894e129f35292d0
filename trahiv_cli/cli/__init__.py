"""The command line: it parses options, makes one call into other packages, and prints. Decides nothing."""
