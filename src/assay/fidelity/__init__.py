"""Is the candidate distribution the reference's, within a declared margin?"""
