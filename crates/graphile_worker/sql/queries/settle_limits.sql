-- Puts waiting jobs where the limits want them. Returns how much was done; 0 if nothing is left to do.
select :"schema"._rs_settle_lanes();
