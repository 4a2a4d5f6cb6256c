"""The rules of the verdict of `assay check`, one question a file. Margins stand in the file that uses them."""
