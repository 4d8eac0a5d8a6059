"""Methods, one folder each: the stage, the part of the algorithm that only this method uses, the pipeline file, and a
page that says what it is for, its settings and its measured effect.
"""
