"""Whose request it is by the key that it shows, what that key allows, what is left of its limits, and what it used."""
