"""The C++ back end: how it is built, bound, checked and called."""
