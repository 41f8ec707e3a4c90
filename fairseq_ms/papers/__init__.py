"""What only the papers' tables need: commands of the form that `fairseq_ms.commands` describes."""
