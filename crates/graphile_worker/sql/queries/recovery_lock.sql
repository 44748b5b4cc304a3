-- Takes the right to sweep until the transaction ends, which it does if whoever sweeps is not heard of for a minute.
select :"schema"._rs_sweep_lock() as is_ours, set_config('idle_in_transaction_session_timeout', '60s', true);
