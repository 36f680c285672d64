"""The builder: specs -> generated/*.cu -> cubins and a manifest. Needs the extra [build]; the run time imports none of it."""
