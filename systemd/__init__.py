"""Service units, shipped as package data."""
