//! A caller's search_path cannot redirect a function, whatever it holds.

use crate::support::{Db, rows};
use serde_json::json;

#[tokio::test]
async fn functions_find_their_own_objects_whatever_the_caller_has_in_the_way() {
    let db = Db::installed().await;
    db.run(
        "create schema trap;
         create table trap._private_jobs (like graphile_worker._private_jobs including all);
         create table trap._private_tasks (like graphile_worker._private_tasks including all);
         create table trap._private_job_queues (like graphile_worker._private_job_queues including all);
         create function trap.now() returns timestamptz language sql as $$ select timestamptz '1999-01-01Z' $$;
         create function trap.pg_notify(text, text) returns void language plpgsql as $$ begin raise 'trapped'; end $$;
         create function trap.length(text) returns int language plpgsql as $$ begin raise 'trapped'; end $$;
         create function trap._rs_task_id(text) returns int language plpgsql as $$ begin raise 'trapped'; end $$;
         create function trap.equal(text, text) returns boolean language plpgsql as $$ begin raise 'trapped'; end $$;
         create operator trap.= (leftarg = text, rightarg = text, function = trap.equal);
         create type trap.job_spec as (identifier text);
         select graphile_worker.add_job('t', queue_name := 'q', job_key := 'k') from generate_series(1, 3)",
    )
    .await;
    let mut caller = db.connect().await;
    sqlx::raw_sql("create temp table _private_jobs (id int); set search_path = trap, pg_temp, pg_catalog")
        .execute(&mut caller)
        .await
        .unwrap();
    for call in [
        "add_job('t', '{}', 'q', null, 3, null, 1, array['f'])",
        "add_job('new', '{}', 'new', null, 3, 'k')",
        "add_job('t', job_key := 'd', job_key_mode := 'unsafe_dedupe')",
        "add_jobs(array[('t', null, 'q', null, null, null, null, null)]::graphile_worker.job_spec[])",
        "add_jobs(array[('t', null, 'q', null, null, 'k', null, null)]::graphile_worker.job_spec[])",
        "reschedule_jobs(array[1], run_at := null, priority := 4)",
        "permanently_fail_jobs(array[1])",
        "force_unlock_workers(array['w'])",
        "remove_job('d')",
        "complete_jobs(array[1])",
    ] {
        rows(&mut caller, &format!("select 1 as one from graphile_worker.{call}"))
            .await
            .unwrap_or_else(|error| panic!("{call}: {error}"));
    }
    let left = db
        .value("select json_agg(json_build_array(task_identifier, priority) order by id) from graphile_worker.jobs")
        .await;
    assert_eq!(left, json!([["t", 1], ["t", 0]]), "the keyed ones were removed and completed");
    assert_eq!(db.value("select count(*) from graphile_worker.jobs where run_at < '2000-01-01Z'").await, 0);
    assert_eq!(db.value("select count(*) from trap._private_jobs").await, 0);
}
