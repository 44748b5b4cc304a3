-- Takes the right to sweep until the transaction ends.
select :"schema"._rs_sweep_lock() as is_ours;
