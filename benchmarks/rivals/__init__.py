"""What our plans and our planning are held against: other searches and families of plans, and models to plan."""
