"""Define the form of each kind of spec file, and make frozen specs of checked content."""
