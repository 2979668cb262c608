"""Local SGD and DiLoCo: workers train on their own and synchronise every so many steps."""
