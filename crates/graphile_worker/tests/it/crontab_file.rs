//! A crontab in a file: its errors, and its changes while the worker runs.

use crate::cron::{Clocked, ticks, time};
use crate::support::{Db, Log};
use graphile_worker::WorkerOptions;
use serde_json::json;
use std::path::PathBuf;

/// A file that is gone after the test.
struct File(PathBuf);

impl File {
    fn new() -> File {
        static NUMBER: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        File(std::env::temp_dir().join(format!("graphile_worker_crontab_{}_{number}", std::process::id())))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[tokio::test]
async fn a_crontab_that_changes_is_reloaded() {
    let (log, _logging) = Log::start();
    let db = Db::installed().await;
    let file = File::new();
    let crontab = &file.0;
    let write = |text: &str| std::fs::write(crontab, text).unwrap();
    let options = WorkerOptions::default().pg_pool(db.pool.clone()).crontab_file_if_any(crontab).watch(true);
    let mut clocked = Clocked::with(options, "07:30:00").await;
    write("0 8 * * * a\n0 10 * * * b");
    log.logged("crontab reloaded", 1).await;
    clocked.looked(time("07:30:00")).await;
    clocked.set("08:00:00").await;
    clocked.set("09:30:00").await;
    assert_eq!(ticks(&db).await, json!(["08:00:00"]));

    write("0 9,11 * * * a\n0 10 * * * b");
    log.logged("crontab reloaded", 2).await;
    clocked.looked(time("09:30:00")).await;
    assert_eq!(ticks(&db).await, json!(["08:00:00"]), "at 9 the item was another");
    clocked.set("10:00:00").await;
    clocked.set("11:00:00").await;
    assert_eq!(ticks(&db).await, json!(["08:00:00", "10:00:00", "11:00:00"]));

    write("61 * * * * a\n* * * * c");
    log.logged("the changed crontab is invalid; keeping the previous one", 1).await;
    assert!(log.text().contains("crontab line 1, column 1") && log.text().contains("crontab line 2"), "{}", log.text());
    db.run("delete from graphile_worker._private_jobs").await;
    clocked.clock.set("2026-03-11T09:00:00Z".parse().unwrap());
    clocked.looked("2026-03-11T09:00:00Z".parse().unwrap()).await;
    assert_eq!(ticks(&db).await, json!(["09:00:00"]), "the previous crontab stays in use");

    std::fs::remove_file(crontab).unwrap();
    log.logged("items=0", 1).await;
    clocked.looked("2026-03-11T09:00:00Z".parse().unwrap()).await;
    clocked.clock.set("2026-03-11T12:00:00Z".parse().unwrap());
    clocked.looked("2026-03-11T12:00:00Z".parse().unwrap()).await;
    assert_eq!(ticks(&db).await, json!(["09:00:00"]));
    clocked.started.stop().await;
}

#[tokio::test]
async fn an_invalid_crontab_is_an_error_with_its_file_and_lines() {
    let db = Db::installed().await;
    let file = File::new();
    let crontab = &file.0;
    let error = async || {
        let options = WorkerOptions::default().pg_pool(db.pool.clone()).crontab_file(crontab);
        options.init().await.err().unwrap().to_string()
    };
    assert_eq!(error().await, format!("the crontab {} does not exist", crontab.display()));
    std::fs::write(crontab, "61 * * * * a\n* * * * b\n").unwrap();
    let error = error().await;
    assert!(error.starts_with(&format!("the crontab {} is invalid:\ncrontab line 1", crontab.display())), "{error}");
    assert!(error.contains("crontab line 2"), "{error}");
}
