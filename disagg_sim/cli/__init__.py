"""The command line. Each command is a module that parses its arguments, calls one public function, and prints."""
