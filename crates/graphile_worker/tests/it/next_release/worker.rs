//! The worker of both releases: it writes to a file what it ran, and some of its jobs end on request.

use graphile_worker::{WorkerContext, WorkerOptions};
use serde_json::Value;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

pub(crate) async fn run(release: &'static str) {
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stderr).init();
    let folder = PathBuf::from(std::env::var_os("GW_TEST_FOLDER").unwrap());
    let mut options = WorkerOptions::default()
        .database_url(&std::env::var("GW_TEST_URL").unwrap())
        .concurrency(4)
        .poll_interval(Duration::from_millis(100));
    if std::env::var_os("GW_TEST_RECOVERY").is_some() {
        options = options.heartbeat_interval(Duration::from_millis(500)).sweep_threshold(Duration::from_secs(60));
    }
    if let Ok(seconds) = std::env::var("GW_TEST_MIGRATION_WAIT") {
        options = options.max_migration_wait(Duration::from_secs(seconds.parse().unwrap()));
    }
    let say = {
        let folder = folder.clone();
        move |line: String| {
            let mut ran = std::fs::OpenOptions::new().create(true).append(true).open(folder.join("ran")).unwrap();
            writeln!(ran, "{line} {release}").unwrap();
        }
    };
    let said = say.clone();
    let worker = options
        .define_task("quick", move |name: String, _: WorkerContext| {
            said(name);
            async {}
        })
        .define_task("until_told", move |name: String, _: WorkerContext| {
            let (say, told) = (say.clone(), folder.join("finish"));
            async move {
                while !told.exists() {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                say(name);
            }
        })
        .define_task("nothing", |_: Value, _: WorkerContext| async {})
        .init()
        .await;
    let ended = match worker {
        Ok(worker) => worker.run().await,
        Err(error) => Err(error),
    };
    if let Err(error) = ended {
        eprintln!("refused: {error}");
        std::process::exit(3);
    }
}
