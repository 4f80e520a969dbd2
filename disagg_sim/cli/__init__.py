"""The command line: one module a command; it parses, calls one public function, and prints."""
