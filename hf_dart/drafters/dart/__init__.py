"""DART heads: the head (`drafter`), its network (`modeling`), its shape (`configuration`), its parts."""
