//! How workers connect: TLS, IPv6, sockets, several servers, odd names, passwords that change. The parser of connection strings
//! is tested beside it; here are real servers.

use crate::support::{Db, Log, Started, until};
use graphile_worker::{DatabaseConfig, Error, FetchError, JobSpec, WorkerContext, WorkerOptions, WorkerUtils};
use graphile_worker_devdb::{Cluster, ClusterOptions};
use graphile_worker_scripts::TasksDir;
use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};

/// A server of its own, for what would disturb others. Its files go when it is dropped.
struct OwnServer {
    cluster: Option<Cluster>,
    folder: PathBuf,
}

impl OwnServer {
    fn start(name: &str) -> OwnServer {
        let folder = std::env::temp_dir().join(format!("gw-connections-{name}-{}", std::process::id()));
        let options = ClusterOptions::new(folder.join("db")).durable(false).fresh(true);
        OwnServer { cluster: Some(options.open().unwrap()), folder }
    }

    fn cluster(&self) -> &Cluster {
        self.cluster.as_ref().unwrap()
    }

    fn port(&self) -> u16 {
        self.cluster().options("postgres").get_port()
    }

    async fn run(&self, sql: &str) {
        let mut connection = PgConnection::connect_with(&self.cluster().options("postgres")).await.unwrap();
        let ran = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await;
        ran.unwrap_or_else(|error| panic!("{error}\n{sql}"));
        connection.close().await.unwrap();
    }

    /// Runs a command as the user of the server, in the folder of its data.
    async fn shell(&self, command: &str) {
        // One that does not read what it is given may end before that is written.
        let command = format!("cat >/dev/null; {command}").replace('\'', "''");
        self.run(&format!("copy (select 1) to program '{command}'")).await;
    }

    /// Makes the server's own copy of a file ours.
    async fn fetch(&self, name: &str) -> PathBuf {
        let mut connection = PgConnection::connect_with(&self.cluster().options("postgres")).await.unwrap();
        let text: String =
            sqlx::query_scalar("select pg_read_file($1)").bind(name).fetch_one(&mut connection).await.unwrap();
        let path = self.folder.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// Presents this certificate to new connections.
    async fn presents(&self, certificate: &str, connection: &str) {
        self.run(&format!("alter system set ssl_cert_file = '{certificate}.crt'")).await;
        self.run(&format!("alter system set ssl_key_file = '{certificate}.key'")).await;
        self.run("alter system set ssl_ca_file = 'ca.crt'").await;
        self.run("alter system set ssl = on").await;
        self.run("select pg_reload_conf()").await;
        // Sessions begin with what the postmaster has read: until one has the new certificate.
        until("the certificate is presented", async || {
            let mut session = DatabaseConfig::parse(connection).unwrap().connect().await.ok()?;
            let file: String = sqlx::query_scalar("show ssl_cert_file").fetch_one(&mut session).await.ok()?;
            (file == format!("{certificate}.crt")).then_some(())
        })
        .await;
    }
}

impl Drop for OwnServer {
    fn drop(&mut self) {
        if let Some(cluster) = self.cluster.take() {
            let _ = cluster.stop();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Whether a connection that this string describes is encrypted; or why there is none.
async fn is_encrypted(text: &str) -> Result<bool, String> {
    let config = DatabaseConfig::parse(text).map_err(|error| error.to_string())?;
    let mut connection = config.connect().await.map_err(|error| with_sources(&error))?;
    let asked = sqlx::query_scalar("select ssl from pg_stat_ssl where pid = pg_backend_pid()");
    let encrypted = asked.fetch_one(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    Ok(encrypted)
}

fn with_sources(error: &dyn std::error::Error) -> String {
    let source = error.source().map(with_sources);
    source.map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))
}

/// Two authorities, and certificates that one of them or none has signed.
const CERTIFICATES: &str = "
set -e
for ca in ca other; do
  openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=$ca -keyout $ca.key -out $ca.crt
done
sign() {
  openssl req -newkey rsa:2048 -nodes -subj /CN=$2 -keyout $1.key -out $1.csr
  openssl x509 -req -in $1.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 $3 $4 -out $1.crt
}
printf 'subjectAltName=DNS:localhost' > names
sign good localhost -extfile names
sign client odd_client -extfile names
sign version1 localhost
openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout self.key -out self.crt
chmod 600 *.key
";

#[tokio::test]
async fn tls_means_what_it_means_to_libpq() {
    let server = OwnServer::start("tls");
    server.shell(&format!("({CERTIFICATES}) >certificates.log 2>&1")).await;
    let (ca, other, own) =
        (server.fetch("ca.crt").await, server.fetch("other.crt").await, server.fetch("self.crt").await);
    let (ca, other, own) = (ca.display(), other.display(), own.display());
    server.run("alter role postgres password 'secret'; create role odd_client login").await;
    let port = server.port();
    let at = |host: &str, more: &str| {
        format!("host={host} port={port} user=postgres password=secret dbname=postgres {more}")
    };
    server.presents("good", &at("127.0.0.1", "sslmode=disable")).await;

    for (text, encrypted) in [
        (at("localhost", "sslmode=disable"), false),
        (at("localhost", ""), true),
        (at("localhost", "sslmode=require"), true),
        (at("localhost", &format!("sslmode=require sslrootcert={ca}")), true),
        (at("127.0.0.1", &format!("sslmode=verify-ca sslrootcert={ca}")), true),
        (at("localhost", &format!("sslmode=verify-full sslrootcert={ca}")), true),
        // As libpq: what is only preferred is done without, if the server cannot be trusted.
        (at("localhost", &format!("sslrootcert={other}")), false),
        (format!("postgres://postgres:secret@localhost:{port}/postgres?ssl=true"), true),
    ] {
        assert_eq!(is_encrypted(&text).await, Ok(encrypted), "{text}");
    }
    for (text, message) in [
        (at("localhost", &format!("sslmode=require sslrootcert={other}")), "no authority in sslrootcert has signed"),
        (at("localhost", &format!("sslmode=verify-ca sslrootcert={other}")), "no authority in sslrootcert has signed"),
        (at("localhost", "sslmode=verify-full"), "no authority of the system has signed"),
        (
            at("127.0.0.1", &format!("sslmode=verify-full sslrootcert={ca}")),
            "connect with a host name from the certificate's subjectAltName",
        ),
        (
            at("localhost", "sslmode=require sslrootcert=/nonexistent/root.crt"),
            "sslrootcert is \"/nonexistent/root.crt\", which cannot be read",
        ),
        (at("localhost", "channel_binding=require"), "channel_binding is \"require\", which is not supported"),
        (at("localhost", "sslmode=verify_full"), "sslmode is \"verify_full\", expected one of"),
    ] {
        let problem = is_encrypted(&text).await.expect_err(&text);
        assert!(problem.contains(message), "{text}: {problem}");
    }

    // A file that goes away later is named when a connection needs it.
    let gone = server.folder.join("gone.crt");
    std::fs::copy(ca.to_string(), &gone).unwrap();
    let config =
        DatabaseConfig::parse(&at("localhost", &format!("sslmode=verify-full sslrootcert={}", gone.display())))
            .unwrap();
    config.connect().await.unwrap();
    std::fs::remove_file(&gone).unwrap();
    let problem = with_sources(&config.connect().await.unwrap_err());
    assert!(problem.contains("sslrootcert is") && problem.contains("gone.crt"), "{problem}");

    // A worker, its handlers' pool and its programs.
    let tasks = server.folder.join("tasks");
    let root = server.folder.join("ca.crt");
    let url =
        format!("postgres://postgres:secret@localhost:{port}/postgres?sslmode=require&sslrootcert={}", root.display());
    for (number, options) in [
        WorkerOptions::default().database_url(&url),
        WorkerOptions::default().pg_pool(sqlx::PgPool::connect(&url.replace("require", "verify-ca")).await.unwrap()),
    ]
    .into_iter()
    .enumerate()
    {
        run_a_program(options, &tasks, number).await;
    }

    // Client certificates, and rules of the server about encryption.
    let (cert, key) = (server.fetch("client.crt").await, server.fetch("client.key").await);
    let rules = "printf 'local all all trust\\nhostssl all odd_client all cert\\nhostssl all all all scram-sha-256\\n' > pg_hba.conf";
    server.shell(rules).await;
    server.run("select pg_reload_conf()").await;
    let with_certificate = format!(
        "host=localhost port={port} user=odd_client dbname=postgres sslmode=verify-full sslrootcert={ca} sslcert={} sslkey={}",
        cert.display(),
        key.display()
    );
    until("the rules are read", async || is_encrypted(&at("localhost", "sslmode=disable")).await.err()).await;
    assert_eq!(is_encrypted(&with_certificate).await, Ok(true));
    assert_eq!(is_encrypted(&at("localhost", "sslmode=allow")).await, Ok(true), "the server wants encryption");
    server.shell("printf 'local all all trust\\nhostnossl all all all scram-sha-256\\n' > pg_hba.conf").await;
    server.run("select pg_reload_conf()").await;
    until("the rules are read", async || is_encrypted(&at("localhost", "sslmode=require")).await.err()).await;
    assert_eq!(is_encrypted(&at("localhost", "")).await, Ok(false), "the server wants none");
    server.shell("printf 'local all all trust\\nhost all all all scram-sha-256\\n' > pg_hba.conf").await;

    // Certificates that the driver does not take at all.
    for (certificate, text, message) in [
        ("version1", at("localhost", "sslmode=require"), "is an X.509 version 1 certificate, which the driver rejects"),
        ("self", at("localhost", &format!("sslmode=verify-ca sslrootcert={own}")), "is a self-signed CA certificate"),
    ] {
        server.presents(certificate, &at("localhost", "sslmode=disable")).await;
        let problem = is_encrypted(&text).await.expect_err(&text);
        assert!(problem.contains(message), "{problem}");
    }
}

/// What the test below says to itself in another process.
const TRUST: &str = "GRAPHILE_WORKER_TEST_TRUST";

/// The system's authorities are those of the process's environment, so the connections are made in another process.
#[tokio::test]
async fn a_given_authority_is_the_only_one_that_is_trusted() {
    if let Ok(given) = std::env::var(TRUST) {
        let given: Vec<&str> = given.split(' ').collect();
        return trusts_only_what_is_given(given[0], given[1], given[2]).await;
    }
    let server = OwnServer::start("trust");
    server.shell(&format!("({CERTIFICATES}) >certificates.log 2>&1")).await;
    let (ca, other) = (server.fetch("ca.crt").await, server.fetch("other.crt").await);
    server.run("alter role postgres password 'secret'").await;
    let login = format!("host=localhost port={} user=postgres password=secret dbname=postgres", server.port());
    server.presents("good", &format!("{login} sslmode=disable")).await;
    let child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "connections::a_given_authority_is_the_only_one_that_is_trusted", "--nocapture"])
        .env("SSL_CERT_FILE", &ca)
        .env_remove("SSL_CERT_DIR")
        .env(TRUST, format!("{} {} {}", server.port(), ca.display(), other.display()))
        .output()
        .await
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout) + String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && text.contains("1 passed"), "{text}");
}

/// The system trusts the authority of the server's certificate; the other one has signed nothing.
async fn trusts_only_what_is_given(port: &str, ca: &str, other: &str) {
    let at = |host: &str, more: &str| {
        format!("host={host} port={port} user=postgres password=secret dbname=postgres {more}")
    };
    for (text, encrypted) in [
        (at("localhost", "sslmode=verify-full"), true),
        (at("localhost", "sslrootcert=system"), true),
        (at("localhost", &format!("sslmode=verify-full sslrootcert={ca}")), true),
        (at("127.0.0.1", &format!("sslmode=verify-ca sslrootcert={ca}")), true),
        (at("localhost", &format!("sslrootcert={other}")), false),
    ] {
        assert_eq!(is_encrypted(&text).await, Ok(encrypted), "{text}");
    }
    for mode in ["require", "verify-ca", "verify-full"] {
        let text = at("localhost", &format!("sslmode={mode} sslrootcert={other}"));
        let problem = is_encrypted(&text).await.expect_err(&text);
        assert!(problem.contains("no authority in sslrootcert has signed"), "{text}: {problem}");
    }
    // A pool of the application: its options mean the same for the worker's own connections, and for its programs.
    let options = sqlx::postgres::PgConnectOptions::new_without_pgpass()
        .host("localhost")
        .port(port.parse().unwrap())
        .username("postgres")
        .password("secret")
        .database("postgres");
    use sqlx::postgres::PgSslMode::{Prefer, Require, VerifyFull};
    for (mode, root, works) in
        [(Require, ca, true), (Require, other, false), (Prefer, ca, true), (VerifyFull, other, false)]
    {
        let options = options.clone().ssl_mode(mode).ssl_root_cert(root);
        let pool = sqlx::postgres::PgPoolOptions::new().max_connections(2).connect_lazy_with(options);
        let ran = runs_a_job(WorkerOptions::default().pg_pool(pool).startup_timeout(Duration::ZERO)).await;
        match ran {
            Ok(()) => assert!(works, "{mode:?} {root}"),
            Err(error) => {
                let problem = with_sources(&error);
                assert!(!works && problem.contains("no authority in sslrootcert"), "{mode:?} {root}: {problem}");
            }
        }
    }
}

/// Has a program connect to the database with the URL that the worker gives it.
async fn run_a_program(options: WorkerOptions, tasks: &Path, number: usize) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir_all(tasks).unwrap();
    let program = tasks.join("ask");
    let out = tasks.parent().unwrap().join(format!("answer{number}"));
    let query = "select ssl from pg_stat_ssl where pid = pg_backend_pid()";
    let text = format!("#!/bin/sh\npsql \"$GRAPHILE_WORKER_DATABASE_URL\" -XAtc \"{query}\" > '{}'\n", out.display());
    std::fs::write(&program, text).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let worker = options.task_source(TasksDir::new(tasks)).listen_os_shutdown_signals(false).init().await.unwrap();
    worker.create_utils().add_raw_job("ask", (), JobSpec::default()).await.unwrap();
    worker.run_once().await.unwrap();
    assert_eq!(std::fs::read_to_string(out).unwrap(), "t\n");
}

/// A worker for this database runs a job, and its handler uses the pool.
async fn runs_a_job(options: WorkerOptions) -> Result<(), Error> {
    let worker = options
        .listen_os_shutdown_signals(false)
        .define_task("t", |_: Value, ctx: WorkerContext| async move {
            sqlx::query("select 1").execute(ctx.pg_pool()).await.map(drop)
        })
        .init()
        .await?;
    let utils = worker.create_utils();
    let job = utils.add_raw_job("t", (), JobSpec::default()).await?;
    worker.run_once().await?;
    assert!(utils.find_job(job.id).await?.is_none(), "the job is done");
    Ok(())
}

/// Passes everything on to the server of a database.
async fn door(listener: TcpListener, db: &Db) {
    let server = server(db).to_owned();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = TcpStream::connect(&server).await.unwrap();
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut client, &mut server).await });
        }
    });
}

/// Host and port.
fn server(db: &Db) -> &str {
    db.url().split_once('@').unwrap().1.split_once('/').unwrap().0
}

/// `user:password` and the name of the database.
fn login(db: &Db) -> (&str, &str) {
    let (login, rest) = db.url().strip_prefix("postgres://").unwrap().split_once('@').unwrap();
    (login, rest.split_once('/').unwrap().1)
}

#[tokio::test]
async fn ipv6_works_in_urls_pairs_and_pools() {
    let listener = match TcpListener::bind("[::1]:0").await {
        Ok(listener) => listener,
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "::1 cannot be used, and CI has to test it: {error}");
            eprintln!("SKIPPED: ::1 cannot be used on this machine: {error}");
            return;
        }
    };
    let db = Db::installed().await;
    let port = listener.local_addr().unwrap().port();
    door(listener, &db).await;
    let ((login, name), tasks) = (login(&db), std::env::temp_dir());
    let (user, password) = login.split_once(':').unwrap();
    runs_a_job(WorkerOptions::default().database_url(&format!("postgres://{login}@[::1]:{port}/{name}")))
        .await
        .unwrap();
    let pairs = format!("host=::1 port={port} user={user} password={password} dbname={name}");
    runs_a_job(WorkerOptions::default().database_url(&pairs)).await.unwrap();
    let options = db.options().host("::1").port(port);
    let options = sqlx::postgres::PgConnectOptions::new_without_pgpass()
        .host(options.get_host())
        .port(port)
        .username(user)
        .password(password)
        .database(name);
    // The folder has tasks that need the URL of the pool's database.
    let tasks = tasks.join(format!("gw-ipv6-{}", std::process::id()));
    std::fs::create_dir_all(&tasks).unwrap();
    for host in ["::1", "[::1]"] {
        let pool = sqlx::postgres::PgPoolOptions::new().connect_lazy_with(options.clone().host(host));
        let worker = WorkerOptions::default().pg_pool(pool).task_source(TasksDir::new(&tasks));
        if host == "::1" {
            runs_a_job(worker).await.unwrap();
        } else {
            // The driver itself cannot connect there. The worker says so instead of panicking.
            assert!(runs_a_job(worker.startup_timeout(Duration::ZERO)).await.is_err());
        }
    }
    std::fs::remove_dir_all(&tasks).unwrap();
}

#[tokio::test]
async fn a_socket_may_be_named_in_every_way() {
    let db = Db::installed().await;
    let (login, name) = login(&db);
    let (user, password) = login.split_once(':').unwrap();
    let (options, port) = (db.options(), db.options().get_port());
    let folder = options.get_socket().unwrap().display().to_string();
    let encoded = folder.replace('/', "%2F");
    for text in [
        format!("postgresql://{login}@/{name}?host={folder}&port={port}"),
        format!("postgres://{login}@{encoded}:{port}/{name}?sslmode=require"),
        format!("host={folder} port={port} user={user} password={password} dbname={name}"),
    ] {
        runs_a_job(WorkerOptions::default().database_url(&text)).await.unwrap();
    }
    graphile_worker::add_job(
        &format!("postgresql://{login}@/{name}?host={folder}&port={port}"),
        "t",
        (),
        JobSpec::default(),
    )
    .await
    .unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 1);
}

#[tokio::test]
async fn users_passwords_and_databases_may_have_any_character() {
    let db = Db::installed().await;
    let (name, password) = ("o'dd \"ü/?#[]@:%&=+\\ user", "pa ss'\"ü/?#[]@:%&=+\\word");
    let unique = format!("{name} {}", login(&db).1);
    let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    let literal = |text: &str| format!("E'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"));
    db.run(&format!("create role {} login superuser password {}", quoted(&unique), literal(password))).await;
    db.run(&format!("create database {}", quoted(&unique))).await;
    let encoded = |text: &str| text.bytes().map(|byte| format!("%{byte:02x}")).collect::<String>();
    let url = format!("postgres://{}:{}@{}/{}", encoded(&unique), encoded(password), server(&db), encoded(&unique));
    let (host, port) = server(&db).split_once(':').unwrap();
    let value = |text: &str| format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"));
    let pairs = format!("host={host} port={port} user={0} dbname={0} password={1}", value(&unique), value(password));
    let mut problems = Vec::new();
    for text in [&url, &pairs] {
        problems.extend(runs_a_job(WorkerOptions::default().database_url(text)).await.err());
    }
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(2).connect_lazy_with(
        sqlx::postgres::PgConnectOptions::new_without_pgpass()
            .host(host)
            .port(port.parse().unwrap())
            .username(&unique)
            .password(password)
            .database(&unique),
    );
    let tasks = std::env::temp_dir().join(format!("gw-odd-{}", std::process::id()));
    std::fs::create_dir_all(&tasks).unwrap();
    problems.extend(
        runs_a_job(WorkerOptions::default().pg_pool(pool.clone()).task_source(TasksDir::new(&tasks))).await.err(),
    );
    pool.close().await;
    std::fs::remove_dir_all(&tasks).unwrap();
    // `with (force)` came with PostgreSQL 13.
    let sessions = format!(
        "select pg_terminate_backend(pid) from pg_stat_activity where datname = '{}'",
        unique.replace('\'', "''")
    );
    until("its sessions have ended", async || {
        db.run(&sessions).await;
        db.value(&format!("select count(*) from pg_stat_activity where datname = '{}'", unique.replace('\'', "''")))
            .await
            .eq(&0)
            .then_some(())
    })
    .await;
    db.run(&format!("drop database {}", quoted(&unique))).await;
    db.run(&format!("drop role {}", quoted(&unique))).await;
    assert!(problems.is_empty(), "{problems:?}");
}

#[tokio::test]
async fn of_several_servers_the_first_suitable_one_is_used_and_replaced_when_it_is_gone() {
    let db = Db::installed().await;
    let (login, name) = login(&db);
    let (user, password) = login.split_once(':').unwrap();
    // A server with the same database, in which nothing can be written.
    let spare = OwnServer::start("spare");
    spare.run(&format!("create database \"{name}\"")).await;
    spare.run(&format!("alter database \"{name}\" set default_transaction_read_only = on")).await;
    spare.run(&format!("alter role \"{user}\" password '{password}'")).await;
    let read_only = format!("127.0.0.1:{}", spare.port());
    let servers = format!("127.0.0.1:1,{read_only},{}", server(&db));
    let port_of = async |more: &str| {
        let config = DatabaseConfig::parse(&format!("postgres://{login}@{servers}/{name}?{more}")).unwrap();
        let mut connection = config.connect().await.map_err(|error| with_sources(&error))?;
        let port: String = sqlx::query_scalar("show port").fetch_one(&mut connection).await.unwrap();
        Ok::<_, String>(format!("127.0.0.1:{port}"))
    };
    let writable = Ok(server(&db).to_owned());
    assert_eq!(port_of("").await, Ok(read_only.clone()), "the first that answers");
    assert_eq!(port_of("target_session_attrs=read-write").await, writable);
    assert_eq!(port_of("target_session_attrs=read-write&load_balance_hosts=random").await, writable);
    assert_eq!(port_of("target_session_attrs=read-only").await, Ok(read_only.clone()));
    assert_eq!(port_of("target_session_attrs=primary").await, Ok(read_only.clone()));
    assert_eq!(port_of("target_session_attrs=prefer-standby").await, Ok(read_only.clone()));
    let problem = port_of("target_session_attrs=standby").await.unwrap_err();
    for said in ["127.0.0.1:1: ", "Connection refused", "the server is not a standby"] {
        assert!(problem.contains(said), "{problem}");
    }

    // The worker's own connections and the handlers' pool go where it can write, and move on together.
    let first = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = first.local_addr().unwrap();
    let server_of_db = server(&db).to_owned();
    let passing = tokio::spawn(async move {
        let mut open = tokio::task::JoinSet::new();
        while let Ok((mut client, _)) = first.accept().await {
            let mut server = TcpStream::connect(&server_of_db).await.unwrap();
            open.spawn(async move { tokio::io::copy_bidirectional(&mut client, &mut server).await });
        }
    });
    let ran = Arc::new(AtomicUsize::new(0));
    let runs = ran.clone();
    let url =
        format!("postgres://{login}@{address},{servers}/{name}?target_session_attrs=read-write&connect_timeout=3");
    let options = WorkerOptions::default().database_url(&url).listen_os_shutdown_signals(false).max_pg_conn(1);
    let started = Started::new(options.define_task("t", move |_: Value, ctx: WorkerContext| {
        let runs = runs.clone();
        async move {
            sqlx::query("create temp table t ()").execute(ctx.pg_pool()).await?;
            sqlx::query("drop table t").execute(ctx.pg_pool()).await?;
            runs.fetch_add(1, Ordering::SeqCst);
            Ok::<_, sqlx::Error>(())
        }
    }))
    .await;
    db.add_job("'t'").await;
    until("a job ran", async || (ran.load(Ordering::SeqCst) == 1).then_some(())).await;
    passing.abort();
    let _ = passing.await;
    db.add_job("'t'").await;
    until("the next one ran on the way that is left", async || (ran.load(Ordering::SeqCst) == 2).then_some(())).await;
    started.stop().await;
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
}

#[tokio::test]
async fn a_rotated_password_loses_no_outcome() {
    let db = Db::installed().await;
    let role = format!("rotated_{}", login(&db).1);
    db.run(&format!("create role \"{role}\" login superuser password 'first'")).await;
    let (log, _guard) = Log::start();
    let password = Arc::new(Mutex::new("first"));
    let asked = Arc::new(AtomicUsize::new(0));
    let (current, asks) = (password.clone(), asked.clone());
    let url = format!("postgres://{role}@{}/{}", server(&db), login(&db).1);
    let begun = Arc::new(tokio::sync::Notify::new());
    let go_on = Arc::new(tokio::sync::Notify::new());
    let (begins, goes_on) = (begun.clone(), go_on.clone());
    let errors: Arc<Mutex<Vec<String>>> = Arc::default();
    let hears = errors.clone();
    let said = |text: &str| errors.lock().unwrap().iter().any(|error| error.contains(text)).then_some(());
    let options = WorkerOptions::default()
        .database_url(&url)
        .on(FetchError, move |ctx| {
            hears.lock().unwrap().extend(ctx.error);
            async {}
        })
        .password_provider(move || {
            asks.fetch_add(1, Ordering::SeqCst);
            let password = *current.lock().unwrap();
            async move { if password.is_empty() { Err("the vault is sealed") } else { Ok(format!("{password}\n")) } }
        })
        .listen_os_shutdown_signals(false)
        // One slot stays free, so that the worker continues to claim jobs.
        .concurrency(2)
        .define_task("t", move |_: Value, ctx: WorkerContext| {
            let (begins, goes_on) = (begins.clone(), goes_on.clone());
            async move {
                begins.notify_one();
                goes_on.notified().await;
                // The pool does not ask a connection that was used a second ago whether it is alive, and may give us one that
                // was closed. The next one is new.
                let _ = sqlx::query("select 1").execute(ctx.pg_pool()).await;
                sqlx::query("select 1").execute(ctx.pg_pool()).await.map(drop)
            }
        });
    let started = Started::new(options).await;
    db.add_job("'t'").await;
    begun.notified().await;
    db.run(&format!("alter role \"{role}\" password 'second'")).await;
    let end = format!("select pg_terminate_backend(pid) from pg_stat_activity where usename = '{role}'");
    db.rows(&end).await;
    until("its login is refused", async || said("password authentication failed")).await;
    *password.lock().unwrap() = "";
    until("the password cannot be had", async || said("could not get the password: the vault is sealed")).await;
    *password.lock().unwrap() = "second";
    until("it is back", async || log.line("the database is back")).await;
    go_on.notify_one();
    until("the outcome is written", async || {
        assert_eq!(log.line("job failed"), None, "{}", log.text());
        (db.value("select count(*) from graphile_worker.jobs").await == 0).then_some(())
    })
    .await;
    started.stop().await;
    assert!(asked.load(Ordering::SeqCst) > 2);
    assert_eq!(log.line("job failed"), None, "{}", log.text());
    db.run(&format!("reassign owned by \"{role}\" to postgres; drop role \"{role}\"")).await;
    for secret in ["first", "second"] {
        assert!(!log.text().contains(secret), "{}", log.text());
    }
}

#[tokio::test]
async fn a_wrong_password_fails_the_start_at_once_and_a_panic_of_its_provider_is_reported() {
    let db = Db::installed().await;
    let url = format!("postgres://postgres@{}/{}", server(&db), login(&db).1);
    let options = || WorkerOptions::default().database_url(&url);
    let wrong = options().password_provider(|| async { Ok::<_, std::convert::Infallible>("wrong".to_owned()) });
    let problem = with_sources(&runs_a_job(wrong).await.unwrap_err());
    assert!(problem.contains("password authentication failed"), "{problem}");
    let panics = options().startup_timeout(Duration::ZERO).password_provider(|| async {
        if true {
            panic!("no");
        }
        Ok::<_, std::convert::Infallible>(String::new())
    });
    let problem = with_sources(&runs_a_job(panics).await.unwrap_err());
    assert!(problem.contains("could not get the password: the password provider panicked"), "{problem}");
}

#[tokio::test]
async fn a_parameter_that_is_not_supported_is_named_and_never_printed() {
    let (log, _guard) = Log::start();
    for (text, message) in [
        ("postgres://h/d?sslpassword=hunter2", "sslpassword is not supported: the driver cannot decrypt a client key"),
        ("postgres://h/d?hunter=hunter2", "unknown parameter \"hunter\""),
        ("postgres://h/d?sslnegotiation=direct", "sslnegotiation is \"direct\", which is not supported"),
    ] {
        let problem = runs_a_job(WorkerOptions::default().database_url(text)).await.unwrap_err().to_string();
        assert!(problem.starts_with("invalid connection parameters: ") && problem.contains(message), "{problem}");
        assert!(!problem.contains("hunter2"));
        let problem = graphile_worker::add_job(text, "t", (), JobSpec::default()).await.unwrap_err().to_string();
        assert!(problem.contains(message), "{problem}");
    }
    assert!(!log.text().contains("hunter2"), "{}", log.text());
    let short = WorkerOptions::default().database_url("postgres://h/d").answer_timeout(Duration::from_millis(10));
    let problem = runs_a_job(short).await.unwrap_err().to_string();
    assert_eq!(problem, "answer_timeout is 10ms, must be at least 1s");
}

/// Tasks in JavaScript, with a `pg` that tells what it was given.
#[tokio::test]
async fn scripts_get_the_same_database_and_a_changed_password() {
    let db = Db::installed().await;
    let folder = std::env::temp_dir().join(format!("gw-script-database-{}", std::process::id()));
    let file = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    file("root.crt", "a certificate");
    file(
        "node_modules/pg/index.js",
        "exports.Pool = class {
           constructor(options) { this.options = options; }
           on() {}
           async connect() { const o = this.options; return { query: async () => o, release() {} }; }
         };",
    );
    let out = folder.join("out");
    file(
        "tasks/ask.js",
        &format!(
            "module.exports = async (payload, helpers) => require('fs').appendFileSync('{}', JSON.stringify(await helpers.query('x')) + '\\n');",
            out.display()
        ),
    );
    let password = Arc::new(Mutex::new("ö @1".to_owned()));
    let current = password.clone();
    let options: sqlx::postgres::PgConnectOptions = db.options();
    let root = folder.join("root.crt");
    // The pool goes by the socket; what is said of certificates is only for others.
    let pool = sqlx::PgPool::connect_with(options.ssl_root_cert(&root).ssl_mode(sqlx::postgres::PgSslMode::Prefer))
        .await
        .unwrap();
    let options = WorkerOptions::default()
        .pg_pool(pool)
        .password_provider(move || {
            let password = current.lock().unwrap().clone();
            async move { Ok::<_, std::convert::Infallible>(password) }
        })
        .task_source(TasksDir::new(folder.join("tasks")))
        .listen_os_shutdown_signals(false);
    let started = Started::new(options).await;
    let answers = async |count: usize| {
        until("the script has asked", async || {
            let text = std::fs::read_to_string(&out).unwrap_or_default();
            let lines: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
            (lines.len() >= count).then(|| lines[count - 1].clone())
        })
        .await
    };
    WorkerUtils::new(db.pool.clone(), "graphile_worker").add_raw_job("ask", (), JobSpec::default()).await.unwrap();
    let first = answers(1).await;
    assert_eq!(first["password"], "ö @1");
    assert_eq!(first["database"], login(&db).1);
    assert_eq!(first["host"], db.options().get_socket().unwrap().display().to_string());
    assert_eq!(first["ssl"], false);
    *password.lock().unwrap() = "second".to_owned();
    db.rows("select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and application_name like 'graphile_worker rs%'").await;
    until("the worker has another connection", async || {
        db.add_job("'ask'").await;
        let text = std::fs::read_to_string(&out).unwrap_or_default();
        text.contains("\"second\"").then_some(())
    })
    .await;
    started.stop().await;
    std::fs::remove_dir_all(&folder).unwrap();
}
