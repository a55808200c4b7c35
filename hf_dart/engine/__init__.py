"""Rounds whose target forward, and draft, run on fixed shapes, compiled and captured; `docs/gpu.md` says how."""
