//! Live upgrades, with two real programs: this test binary, started again, is the old release; the example `next_release`,
//! which has a breaking step more, is the new one.

use crate::support::{Db, PATIENCE};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

#[path = "next_release/worker.rs"]
mod worker;

/// The old release, where it is asked for.
#[tokio::test]
async fn old_release() {
    if std::env::var_os("GW_TEST_OLD_RELEASE").is_some() {
        worker::run("old").await;
    }
}

/// The new release, built with the same features otherwise, so that only this library is compiled again.
static NEXT_RELEASE: LazyLock<PathBuf> = LazyLock::new(|| {
    let target = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().to_owned();
    let mut build = Command::new(env!("CARGO"));
    build
        .args(["build", "--quiet", "--locked", "--example", "next_release"])
        .args(["--features", "graphile_worker/_next_release,graphile_worker/tokio-postgres"])
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
        .env("CARGO_TARGET_DIR", target.parent().unwrap());
    if target.ends_with("release") {
        build.arg("--release");
    }
    assert!(build.status().unwrap().success(), "the next release cannot be built");
    target.join("examples/next_release")
});

struct Site {
    db: Db,
    folder: PathBuf,
}

struct Program {
    child: Child,
    log: PathBuf,
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let patience = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, patience).await.unwrap_or_else(|_| panic!("not so: {what}"));
}

impl Site {
    async fn new(name: &str) -> Site {
        let folder = std::env::temp_dir().join(format!("gw-upgrade-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Site { db: Db::installed().await, folder }
    }

    fn start(&self, name: &str, mut command: Command) -> Program {
        let log = self.folder.join(format!("{name}.log"));
        command.env("GW_TEST_URL", self.db.url()).env("GW_TEST_FOLDER", &self.folder);
        command.stdout(Stdio::null()).stderr(std::fs::File::create(&log).unwrap());
        Program { child: command.spawn().unwrap(), log }
    }

    fn old(&self, name: &str, with_recovery: bool) -> Program {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "upgrade::old_release", "--nocapture"]).env("GW_TEST_OLD_RELEASE", "1");
        if with_recovery {
            command.env("GW_TEST_RECOVERY", "1");
        }
        self.start(name, command)
    }

    fn new_release(&self, wait: Option<u32>) -> Program {
        let mut command = Command::new(&*NEXT_RELEASE);
        command.env("GW_TEST_NEXT_RELEASE", "1");
        if let Some(seconds) = wait {
            command.env("GW_TEST_MIGRATION_WAIT", seconds.to_string());
        }
        self.start("new", command)
    }

    fn ran(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.folder.join("ran")).unwrap_or_default();
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }

    async fn locked(&self) -> i64 {
        let locked = "select count(*) from graphile_worker.jobs where locked_by like 'rs-%'";
        self.db.value(locked).await.as_i64().unwrap()
    }

    /// Null if the step is not requested, true while a release waits to apply it, false once it is applied.
    async fn step(&self) -> serde_json::Value {
        self.db
            .value("select (select wanted_until is not null from graphile_worker._rs_additions where id = 1000)")
            .await
    }
}

impl Program {
    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    async fn exit_code(&mut self) -> Option<i32> {
        let mut code = None;
        until("the program ends", async || match self.child.try_wait().unwrap() {
            Some(status) => {
                code = status.code();
                true
            }
            None => false,
        })
        .await;
        code
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_new_release_waits_until_the_old_one_has_finished_and_the_old_one_does_not_come_back() {
    LazyLock::force(&NEXT_RELEASE);
    let site = Site::new("waits").await;
    let mut registers = site.old("registers", true);
    site.db.add_job("'until_told', '\"first\"'").await;
    until("a job runs", async || site.locked().await == 1).await;
    let mut does_not = site.old("does-not", false);
    for name in ["second", "third", "fourth", "fifth", "sixth"] {
        site.db.add_job(&format!("'until_told', '\"{name}\"'")).await;
    }
    until("jobs run in both", async || {
        let both = "select count(distinct locked_by) from graphile_worker.jobs where locked_by is not null";
        site.db.value(both).await == 2
    })
    .await;
    until("six run", async || site.locked().await == 6).await;

    let new = site.new_release(None);
    until("the new release waits", async || new.log().contains("waiting for workers of an older release")).await;
    assert_eq!(site.step().await, json!(true));
    for old in [&registers, &does_not] {
        until("it leaves and says why", async || {
            old.log().contains("a newer release changes the schema: stopping")
                && old.log().contains("a newer release is about to")
        })
        .await;
    }
    let mut comes_back = site.old("comes-back", true);
    assert_eq!(comes_back.exit_code().await, Some(3));
    assert!(comes_back.log().contains("refused: a newer release is about to migrate"), "{}", comes_back.log());
    site.db.add_job("'quick', '\"after\"'").await;
    assert_eq!((site.locked().await, site.step().await), (6, json!(true)), "nothing was left in the middle");

    std::fs::write(site.folder.join("finish"), "").unwrap();
    assert_eq!((registers.exit_code().await, does_not.exit_code().await), (Some(0), Some(0)));
    until("the new release works", async || site.ran().len() == 7).await;
    let expected = ["after new", "fifth old", "first old", "fourth old", "second old", "sixth old", "third old"];
    assert_eq!(site.ran(), expected);
    assert_eq!(site.step().await, json!(false));

    let mut rolled_back = site.old("rolled-back", false);
    assert_eq!(rolled_back.exit_code().await, Some(3));
    let said = "has the breaking migration 1000 of graphile_worker for Rust; this release supports migrations up to";
    assert!(rolled_back.log().contains(said), "{}", rolled_back.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_new_release_waits_for_a_limited_time_and_not_for_dead_workers() {
    LazyLock::force(&NEXT_RELEASE);
    let site = Site::new("does-not-wait").await;
    site.db
        .run(
            "insert into graphile_worker._rs_workers (worker_id, last_heartbeat_at)
             values ('rs-live-dead', now() - interval '1 hour');
             select graphile_worker.add_job('nothing');
             update graphile_worker._private_jobs set locked_by = 'rs-live-dead', locked_at = now()",
        )
        .await;
    let new = site.new_release(None);
    until("the step is taken", async || site.step().await == json!(false)).await;
    assert!(!new.log().contains("waiting for workers"), "{}", new.log());
    drop(new);

    let site = Site::new("waits-no-longer").await;
    let mut old = site.old("old", false);
    site.db.add_job("'until_told', '\"first\"'").await;
    until("a job runs", async || site.locked().await == 1).await;
    let new = site.new_release(Some(0));
    until("the step is taken", async || site.step().await == json!(false)).await;
    assert!(new.log().contains("did not finish in time; migrating anyway"), "{}", new.log());
    std::fs::write(site.folder.join("finish"), "").unwrap();
    assert_eq!(old.exit_code().await, Some(0));
    assert_eq!(site.ran(), ["first old"], "and what it held is written");
    until("nothing is left", async || site.db.value("select count(*) from graphile_worker.jobs").await == 0).await;
}
