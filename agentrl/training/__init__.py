"""Training: rows of tokens in, optimiser steps, a model out."""
