"""Storage formats to numbers and back."""
