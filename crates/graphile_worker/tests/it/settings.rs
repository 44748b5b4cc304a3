//! Invalid settings of a worker are errors before it starts.

use crate::support::Db;
use crate::worker_support::options;
use graphile_worker::{TaskOptions, WorkerOptions};
use serde_json::Value;
use std::time::Duration;

#[tokio::test]
async fn invalid_settings_are_errors_that_name_the_setting() {
    let db = Db::empty().await;
    let t = |options: WorkerOptions| options.define_task("t", |_: Value, _| async {});
    for (options, message) in [
        (options(&db).concurrency(0), "concurrency is 0, must be at least 1"),
        (options(&db).poll_interval(Duration::ZERO), "poll_interval is zero, must be greater than zero"),
        (options(&db).schema(""), "the schema name \"\" is empty"),
        (t(t(options(&db))), "the task \"t\" is defined twice: define each task once"),
        (
            t(options(&db)).task_options("u", TaskOptions::default()),
            "task_options names \"u\", which is not a defined task",
        ),
    ] {
        assert_eq!(options.init().await.err().unwrap().to_string(), message);
    }
}
