//! A private PostgreSQL as its users meet it: opened, shared, killed, opened again. Each test has a
//! folder of its own; a second process is this test binary, started again to run `other_process`.

#![allow(missing_docs, clippy::unwrap_used)]

use graphile_worker_devdb::{Cluster, ClusterOptions, Error};
use sqlx::{Connection, PgConnection};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        Folder(std::env::temp_dir().join(format!("gw-devdb-{}-{name}", std::process::id())))
    }

    fn open(&self) -> Cluster {
        ClusterOptions::new(&self.0).durable(false).open().unwrap()
    }

    fn wait_until_stopped(&self) {
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while self.0.join("server/data/postmaster.pid").exists() {
            assert!(std::time::Instant::now() < deadline, "the server is still running");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.0.join("server/data/postmaster.pid").exists() {
            self.wait_until_stopped();
        }
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

async fn connect(cluster: &Cluster) -> PgConnection {
    PgConnection::connect_with(&cluster.options("postgres")).await.unwrap()
}

/// Another process with a handle on the cluster, and the URL it printed.
fn other_owner(folder: &Path) -> (Child, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "other_process", "--nocapture"])
        .env("GW_DEVDB_FOLDER", folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let url = lines.find_map(|line| line.split_once("postgres://").map(|(_, url)| url.to_owned()));
    // Keeps reading, because a closed pipe would fail the other process.
    std::thread::spawn(move || lines.for_each(drop));
    (child, url.expect("the other process prints a URL"))
}

#[test]
fn other_process() {
    let Some(folder) = std::env::var_os("GW_DEVDB_FOLDER") else { return };
    let cluster = ClusterOptions::new(folder).durable(false).open().unwrap();
    println!("\n{}", cluster.url("postgres"));
    // Until our standard input is closed.
    let _ = std::io::stdin().read_line(&mut String::new());
}

#[tokio::test]
async fn a_folder_keeps_its_data_from_one_start_to_the_next() {
    let folder = Folder::new("reuse");
    let cluster = folder.open();
    sqlx::raw_sql("create table kept as select 42 as answer").execute(&mut connect(&cluster).await).await.unwrap();
    cluster.stop().unwrap();
    folder.wait_until_stopped();

    let cluster = folder.open();
    let answer: i32 =
        sqlx::query_scalar("select answer from kept").fetch_one(&mut connect(&cluster).await).await.unwrap();
    assert_eq!(answer, 42);
}

#[tokio::test]
async fn a_fresh_cluster_has_nothing_of_earlier_runs_even_if_it_still_runs() {
    let folder = Folder::new("fresh");
    let cluster = folder.open();
    sqlx::raw_sql("create table notes (note text)").execute(&mut connect(&cluster).await).await.unwrap();
    let fresh = graphile_worker_devdb::ClusterOptions::new(cluster.folder()).fresh(true).open().unwrap();
    let mut connection = connect(&fresh).await;
    let tables = sqlx::query("select from pg_tables where tablename = 'notes'").fetch_all(&mut connection).await;
    assert!(tables.unwrap().is_empty());
}

#[test]
fn the_server_stops_after_its_last_handle_is_dropped() {
    let folder = Folder::new("last");
    let first = folder.open();
    let second = folder.open();
    assert_eq!(first.url("postgres"), second.url("postgres"));
    drop(first);
    drop(second);
    folder.wait_until_stopped();
}

/// The watchdog has decided to stop the server, and takes its time: it still holds its lock.
#[test]
fn the_server_stops_even_if_it_was_started_while_an_earlier_watchdog_was_ending() {
    let folder = Folder::new("ending");
    folder.open().stop().unwrap();
    while folder.0.join("users").exists() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let earlier = std::fs::File::create(folder.0.join("watchdog")).unwrap();
    earlier.lock().unwrap();
    let ending = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(500));
        drop(earlier);
    });
    drop(folder.open());
    ending.join().unwrap();
    folder.wait_until_stopped();
}

#[test]
fn the_server_stops_after_its_owner_was_killed_and_starts_again() {
    let folder = Folder::new("killed");
    let (mut owner, _) = other_owner(&folder.0);
    owner.kill().unwrap();
    owner.wait().unwrap();
    folder.wait_until_stopped();
    drop(folder.open());
}

#[tokio::test]
async fn a_killed_owner_does_not_take_the_server_from_the_others() {
    let folder = Folder::new("shared");
    let (mut owner, url) = other_owner(&folder.0);
    let cluster = folder.open();
    assert!(cluster.url("postgres").ends_with(&url), "both use one server");
    let mut connection = connect(&cluster).await;
    owner.kill().unwrap();
    owner.wait().unwrap();
    // The watchdog looks once a second; it has taken notice when the dead owner's file is gone.
    while std::fs::read_dir(folder.0.join("users")).unwrap().count() > 1 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let one: i32 = sqlx::query_scalar("select 1").fetch_one(&mut connection).await.unwrap();
    assert_eq!(one, 1);
}

#[test]
fn processes_that_start_at_the_same_moment_share_one_server() {
    let folder = Folder::new("race");
    let starters: Vec<_> = (0..6)
        .map(|_| {
            let path = folder.0.clone();
            std::thread::spawn(move || other_owner(&path))
        })
        .collect();
    let owners: Vec<_> = starters.into_iter().map(|starter| starter.join().unwrap()).collect();
    assert!(owners.iter().all(|(_, url)| *url == owners[0].1), "one port and one password");
    for (mut owner, _) in owners {
        drop(owner.stdin.take());
        owner.wait().unwrap();
    }
}

#[tokio::test]
async fn each_database_is_a_copy_of_a_template_that_was_installed_once() {
    let folder = Folder::new("template");
    let cluster = folder.open();
    let installs = std::sync::atomic::AtomicU32::new(0);
    let new_database = || {
        cluster.database("a template 'with' odd characters", async |options| {
            installs.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            let mut connection = PgConnection::connect_with(&options).await?;
            sqlx::raw_sql("create table numbers as select 1 as n").execute(&mut connection).await?;
            Ok(())
        })
    };
    let (first, second) = tokio::join!(new_database(), new_database());
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_eq!(installs.into_inner(), 1);

    let mut connection = PgConnection::connect_with(&first.options()).await.unwrap();
    sqlx::raw_sql("insert into numbers values (2)").execute(&mut connection).await.unwrap();
    let mut other = PgConnection::connect(second.url()).await.unwrap();
    let count: i64 = sqlx::query_scalar("select count(*) from numbers").fetch_one(&mut other).await.unwrap();
    assert_eq!(count, 1, "what one test writes, another does not see");
}

#[tokio::test]
async fn a_database_is_gone_after_its_test() {
    let folder = Folder::new("dropped");
    let cluster = folder.open();
    let database = cluster.database("empty", async |_| Ok(())).await.unwrap();
    let name = database.name().to_owned();
    drop(database);
    let mut connection = connect(&cluster).await;
    loop {
        let exists: bool = sqlx::query_scalar("select exists (select from pg_database where datname = $1)")
            .bind(&name)
            .fetch_one(&mut connection)
            .await
            .unwrap();
        if !exists {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_template_whose_installation_failed_is_not_kept() {
    let folder = Folder::new("failing");
    let cluster = folder.open();
    let error = cluster.database("broken", async |_| Err("no luck".into())).await.unwrap_err();
    assert!(matches!(error, Error::Template { .. }), "{error}");
    cluster.database("broken", async |_| Ok(())).await.unwrap();
}

#[tokio::test]
async fn other_users_need_the_password() {
    let folder = Folder::new("password");
    let cluster = folder.open();
    let url = cluster.url("postgres");
    let password = url.split([':', '@']).nth(2).unwrap();
    assert_eq!(password.len(), 32);
    assert!(PgConnection::connect(&url).await.is_ok());
    assert!(PgConnection::connect(&url.replace(password, "guess")).await.is_err());
    let mode = std::fs::metadata(folder.0.join("server")).unwrap().mode();
    assert_eq!(mode & 0o777, 0o700, "the socket, which asks for none, is out of their reach");
}

#[test]
fn started_by_root_the_server_runs_as_another_user() {
    let folder = Folder::new("root");
    let _cluster = folder.open();
    let ours = std::fs::metadata(&folder.0).unwrap().uid();
    let servers = std::fs::metadata(folder.0.join("server/data")).unwrap().uid();
    assert_ne!(servers, 0);
    assert!(ours == 0 || servers == ours);
}

#[test]
fn started_by_root_a_folder_that_the_server_cannot_enter_is_rejected() {
    let folder = Folder::new("closed");
    let closed = folder.0.join("closed");
    std::fs::create_dir_all(&closed).unwrap();
    std::fs::set_permissions(&closed, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    match (Cluster::open(closed.join("db")), std::fs::metadata(&folder.0).unwrap().uid()) {
        (Err(Error::Unreachable { blocked, .. }), 0) => assert!(blocked.ends_with("closed")),
        (Ok(cluster), uid) if uid != 0 => cluster.stop().unwrap(),
        (other, uid) => panic!("as user {uid}: {other:?}"),
    }
}

#[test]
fn a_folder_whose_path_is_too_long_for_a_socket_works() {
    let folder = Folder::new("long");
    let cluster = ClusterOptions::new(folder.0.join("x".repeat(120))).durable(false).open().unwrap();
    cluster.stop().unwrap();
}

#[test]
fn files_of_a_killed_initdb_are_discarded() {
    let folder = Folder::new("unfinished");
    let unfinished = folder.0.join("server/data.unfinished");
    std::fs::create_dir_all(&unfinished).unwrap();
    std::fs::write(unfinished.join("PG_VERSION"), "1").unwrap();
    drop(folder.open());
}

#[test]
fn a_folder_of_another_version_is_rejected() {
    let folder = Folder::new("version");
    let data = folder.0.join("server/data");
    std::fs::create_dir_all(&data).unwrap();
    std::fs::write(data.join("PG_VERSION"), "9\n").unwrap();
    let message = Cluster::open(&folder.0).unwrap_err().to_string();
    assert!(message.contains("was created by PostgreSQL 9, but"), "{message}");
}

#[test]
fn a_folder_or_a_link_of_another_user_is_rejected() {
    let folder = Folder::new("link");
    let target = folder.0.join("target");
    std::fs::create_dir_all(&target).unwrap();
    std::fs::create_dir_all(folder.0.join("cluster")).unwrap();
    std::os::unix::fs::symlink(&target, folder.0.join("cluster/server")).unwrap();
    let owner = std::fs::metadata(&target).unwrap().uid();
    let error = Cluster::open(folder.0.join("cluster")).unwrap_err();
    assert!(matches!(error, Error::ForeignFolder { .. }), "{error}");
    assert_eq!(std::fs::metadata(&target).unwrap().uid(), owner, "and it is not given away");

    std::os::unix::fs::symlink(&target, folder.0.join("linked")).unwrap();
    assert!(matches!(Cluster::open(folder.0.join("linked")).unwrap_err(), Error::ForeignFolder { .. }));
}

#[tokio::test]
async fn a_server_that_was_killed_is_started_again() {
    let folder = Folder::new("server-killed");
    let first = folder.open();
    let pid = std::fs::read_to_string(folder.0.join("server/data/postmaster.pid")).unwrap();
    let pid = pid.lines().next().unwrap().trim().to_owned();
    assert!(Command::new("kill").args(["-9", &pid]).status().unwrap().success());
    while Command::new("kill").args(["-0", &pid]).stderr(Stdio::null()).status().unwrap().success() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let second = folder.open();
    connect(&second).await;
    drop(first);
}

#[tokio::test]
async fn a_database_keeps_its_server_running() {
    let folder = Folder::new("kept");
    let cluster = folder.open();
    let database = cluster.database("empty", async |_| Ok(())).await.unwrap();
    drop(cluster);
    let users = std::fs::read_dir(folder.0.join("users")).unwrap().count();
    assert_eq!(users, 1, "the watchdog still waits for a process");
    assert!(PgConnection::connect_with(&database.options()).await.is_ok());
}

#[test]
fn a_server_comes_back_on_its_port_and_can_be_found_only_while_it_runs() {
    let folder = Folder::new("port");
    assert_eq!(Cluster::url_if_running(&folder.0, "postgres"), None);
    let cluster = folder.open();
    let url = cluster.url("postgres");
    assert_eq!(Cluster::url_if_running(&folder.0, "postgres"), Some(url.clone()));
    cluster.stop().unwrap();
    assert_eq!(Cluster::url_if_running(&folder.0, "postgres"), None);
    assert_eq!(folder.open().url("postgres"), url);
}

#[tokio::test]
async fn a_standby_follows_its_primary_until_that_is_killed_and_the_standby_promoted() {
    let (folder, folder_of_standby) = (Folder::new("primary"), Folder::new("standby"));
    let primary = folder.open();
    let mut on_primary = connect(&primary).await;
    sqlx::raw_sql("create table t as select generate_series(1, 1000) n").execute(&mut on_primary).await.unwrap();
    let standby = primary.standby(ClusterOptions::new(&folder_of_standby.0).durable(false)).await.unwrap();
    sqlx::raw_sql("insert into t values (1001)").execute(&mut on_primary).await.unwrap();
    let mut on_standby = connect(&standby).await;
    let sum = "select sum(n) from t";
    while sqlx::query_scalar::<_, i64>(sum).fetch_one(&mut on_standby).await.unwrap() != 501_501 {}
    let refused = sqlx::raw_sql("insert into t values (1002)").execute(&mut on_standby).await.unwrap_err();
    assert!(refused.to_string().contains("read-only"), "{refused}");
    // Over TCP, too, with the same password.
    PgConnection::connect(&standby.url("postgres")).await.unwrap();

    primary.kill().unwrap();
    sqlx::raw_sql(sum).execute(&mut on_primary).await.expect_err("the primary is gone");
    primary.kill().unwrap();
    standby.promote().unwrap();
    sqlx::raw_sql("insert into t values (1002)").execute(&mut on_standby).await.unwrap();
    assert_eq!(sqlx::query_scalar::<_, i64>(sum).fetch_one(&mut on_standby).await.unwrap(), 502_503);
}
