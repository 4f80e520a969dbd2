"""The form of each kind of spec file, and how its checked content becomes a frozen spec."""
