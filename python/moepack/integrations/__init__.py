"""Other libraries that can use moepack; each is imported only by its own module here."""
