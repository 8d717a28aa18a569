"""Conversations with tools: how turns become token ids, and what runs the tools."""
