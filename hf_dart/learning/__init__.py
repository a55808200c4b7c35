"""Drafters that keep up with what is served: a head that learns from verified text."""
