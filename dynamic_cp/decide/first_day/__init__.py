"""`dynamic-cp first-day`: what a node's first hour shows, each part in processes of its own.

Read in this order: `day` (the job, its parts with their commands and files, and which are still to be run), `page`
(predicted beside measured), `command` (the options).
"""
