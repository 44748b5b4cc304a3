//! Tasks in JavaScript and Python reach PostgreSQL over TLS with the real drivers, and verify the server by the file that the
//! worker was given: node-pg, psycopg and asyncpg. The folder is `projects/tls`, with one file for each.

#![allow(missing_docs)]

use graphile_worker_devdb::{Cluster, ClusterOptions};
use graphile_worker_interop::{CommandLine, Db, project, python_modules};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::path::{Path, PathBuf};

const OURS: CommandLine = CommandLine::Ours(env!("CARGO_BIN_EXE_ours"));

/// An authority, and a certificate for `localhost` that it has signed. The server's user makes them, in the folder of its data.
const CERTIFICATES: &str = "cat >/dev/null; (set -e
openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=ca -keyout ca.key -out ca.crt
openssl req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout server.key -out server.csr
printf subjectAltName=DNS:localhost > names
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -extfile names -out server.crt
chmod 600 server.key) >certificates.log 2>&1";

/// A server of its own with TLS. Its files go when it is dropped.
struct Server {
    cluster: Option<Cluster>,
    folder: PathBuf,
}

impl Server {
    async fn start() -> Server {
        let folder = std::env::temp_dir().join(format!("gw-interop-tls-{}", std::process::id()));
        let cluster = ClusterOptions::new(folder.join("db")).durable(false).fresh(true).open().expect("a server");
        let server = Server { cluster: Some(cluster), folder };
        server.run(&format!("copy (select 1) to program '{CERTIFICATES}'")).await;
        for (name, value) in [("ssl_cert_file", "server.crt"), ("ssl_key_file", "server.key"), ("ssl", "on")] {
            server.run(&format!("alter system set {name} = '{value}'")).await;
        }
        server.run("select pg_reload_conf()").await;
        server
    }

    fn cluster(&self) -> &Cluster {
        self.cluster.as_ref().expect("a server")
    }

    async fn connect(&self) -> PgConnection {
        PgConnection::connect_with(&self.cluster().options("postgres")).await.expect("a connection")
    }

    async fn run(&self, sql: &str) {
        let ran = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut self.connect().await).await;
        ran.unwrap_or_else(|error| panic!("{error}\n{sql}"));
    }

    /// Our copy of the authority's certificate.
    async fn authority(&self) -> PathBuf {
        let read = sqlx::query_scalar("select pg_read_file('ca.crt')");
        let text: String = read.fetch_one(&mut self.connect().await).await.expect("a file");
        let file = self.folder.join("ca.crt");
        std::fs::write(&file, text).expect("a file");
        file
    }

    fn url(&self, mode: &str, root: &Path) -> String {
        let url = self.cluster().url("postgres").replace("127.0.0.1", "localhost");
        format!("{url}?sslmode={mode}&sslrootcert={}", root.display())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(cluster) = self.cluster.take() {
            let _ = cluster.stop();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_in_other_languages_verify_the_server_by_the_file_that_the_worker_was_given() {
    let server = Server::start().await;
    let root = server.authority().await;
    server.run("create table noted (driver text, ssl boolean)").await;
    let modules = python_modules();
    // Only for what it is to the command line: its database is not used.
    let db = Db::empty().await;
    for mode in ["require", "verify-ca", "verify-full"] {
        let url = server.url(mode, &root);
        let environment = [
            ("PYTHONPATH", modules.to_str().expect("text")),
            ("GRAPHILE_WORKER_PYTHON", "python3"),
            ("DATABASE_URL", url.as_str()),
        ];
        let migrated = OURS.start_with(&db, &project("tls"), &["--schema-only"], &environment).ended().await;
        assert!(migrated.status.success(), "{migrated:?}");
        server.run("truncate noted; select graphile_worker.add_job(task, max_attempts := 1) from unnest(array['node_asks', 'plain_asks', 'awaits_asks']) as task").await;
        let ended = OURS.start_with(&db, &project("tls"), &["--once"], &environment).ended().await;
        assert!(ended.status.success(), "{ended:?}");
        let noted = sqlx::query_scalar("select array_agg(driver || ' ' || ssl order by driver) from noted");
        let noted: Option<Vec<String>> = noted.fetch_one(&mut server.connect().await).await.expect("rows");
        let expected = ["asyncpg true", "node-pg true", "psycopg true"].map(str::to_owned).to_vec();
        assert_eq!(noted, Some(expected), "{mode}: {}", ended.log);
    }
}
