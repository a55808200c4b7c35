"""DART heads: `DartHead` (`drafter`), its network (`modeling`), its shape (`configuration`), and what can be put on it."""
