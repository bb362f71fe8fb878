"""TurboQuant: rows rotated at random and stored with two or three bits a coordinate."""
