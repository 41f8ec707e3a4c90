"""Numerics: the only room that decides by device, keeps less for backward, packs weights or writes a gradient."""
