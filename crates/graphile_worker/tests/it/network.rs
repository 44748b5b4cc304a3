//! A proxy between the worker and the database: it can lose an answer, stop passing anything on, or go to another server.

use crate::support::Db;
use sqlx::PgPool;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[derive(Clone)]
pub(crate) struct Network {
    /// After this many more messages, the next one reaches the server, its answer is lost, and the connection is closed.
    /// Nothing is lost below 0.
    pub(crate) lose_answer_after: Arc<AtomicI64>,
    pub(crate) down: Arc<AtomicBool>,
    /// Connections that listen stay open, and nothing comes through them any more.
    pub(crate) poll_only: Arc<AtomicBool>,
    /// The server answers that it is starting.
    pub(crate) starting: Arc<AtomicBool>,
    /// Everything vanishes, and no connection is closed; new ones are as before.
    pub(crate) partitions: Arc<AtomicUsize>,
    /// New connections are accepted, and nothing that they send arrives anywhere.
    pub(crate) swallows: Arc<AtomicBool>,
    /// Where new connections go.
    server: Arc<Mutex<String>>,
}

fn server(db: &Db) -> &str {
    db.url().split_once('@').unwrap().1.split_once('/').unwrap().0
}

pub(crate) fn url_at(db: &Db, address: SocketAddr) -> String {
    db.url().replace(server(db), &address.to_string())
}

/// What a server says while it starts.
async fn refuse(mut client: TcpStream) {
    let mut message = [0; 1024];
    while let Ok(length @ 1..) = client.read(&mut message).await {
        let is_about_tls = length == 8;
        let error = b"SFATAL\0VFATAL\0C57P03\0Mthe database system is starting up\0\0";
        let error = [&b"E\0\0\0"[..], &[error.len() as u8 + 4], error].concat();
        let answer = if is_about_tls { b"N" } else { &error[..] };
        if client.write_all(answer).await.is_err() || !is_about_tls {
            return;
        }
    }
}

impl Default for Network {
    fn default() -> Network {
        let lose_answer_after = Arc::new(AtomicI64::new(-1));
        Network {
            lose_answer_after,
            down: Arc::default(),
            poll_only: Arc::default(),
            starting: Arc::default(),
            partitions: Arc::default(),
            swallows: Arc::default(),
            server: Arc::default(),
        }
    }
}

impl Network {
    /// A pool whose connections go through this network.
    pub(crate) async fn pool(&self, db: &Db) -> PgPool {
        PgPool::connect(&self.url(db, TcpListener::bind("127.0.0.1:0").await.unwrap())).await.unwrap()
    }

    /// The database's URL for connections that go through this network, by way of this port.
    pub(crate) fn url(&self, db: &Db, listener: TcpListener) -> String {
        let url = url_at(db, listener.local_addr().unwrap());
        self.point_to(server(db));
        self.listen_on(listener);
        url
    }

    /// New connections go to this server, as `host:port`; those that are open stay.
    pub(crate) fn point_to(&self, server: &str) {
        *self.server.lock().unwrap() = server.to_owned();
    }

    pub(crate) fn listen_on(&self, listener: TcpListener) {
        let network = self.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if network.starting.load(Ordering::SeqCst) {
                    tokio::spawn(refuse(client));
                } else if network.swallows.load(Ordering::SeqCst) {
                    tokio::spawn(async move {
                        std::future::pending::<()>().await;
                        drop(client);
                    });
                } else if !network.down.load(Ordering::SeqCst) {
                    let server = network.server.lock().unwrap().clone();
                    // The client's connection is closed if the server is not there.
                    if let Ok(server) = TcpStream::connect(server).await {
                        tokio::spawn(network.clone().pass_on(client, server));
                    }
                }
            }
        });
    }

    async fn pass_on(self, mut client: TcpStream, mut server: TcpStream) {
        let (mut question, mut answer) = (vec![0; 65536], vec![0; 65536]);
        let mut listens = false;
        let since = self.partitions.load(Ordering::SeqCst);
        loop {
            tokio::select! {
                bytes = client.read(&mut question) => {
                    let bytes = bytes.unwrap_or(0);
                    if self.partitions.load(Ordering::SeqCst) > since {
                        std::future::pending::<()>().await;
                    }
                    listens |= question[..bytes].windows(6).any(|word| word == b"LISTEN");
                    if listens && self.poll_only.load(Ordering::SeqCst) {
                        std::future::pending::<()>().await;
                    }
                    let lose = self.lose_answer_after.load(Ordering::SeqCst) >= 0
                        && self.lose_answer_after.fetch_sub(1, Ordering::SeqCst) == 0;
                    if bytes == 0 || self.down.load(Ordering::SeqCst) || server.write_all(&question[..bytes]).await.is_err() {
                        return;
                    }
                    if lose {
                        // The server answers, so it has done what it was asked.
                        let _ = server.read(&mut answer).await;
                        return;
                    }
                }
                bytes = server.read(&mut answer) => {
                    let bytes = bytes.unwrap_or(0);
                    if self.partitions.load(Ordering::SeqCst) > since {
                        std::future::pending::<()>().await;
                    }
                    if listens && self.poll_only.load(Ordering::SeqCst) {
                        std::future::pending::<()>().await;
                    }
                    if bytes == 0 || self.down.load(Ordering::SeqCst) || client.write_all(&answer[..bytes]).await.is_err() {
                        return;
                    }
                }
            }
        }
    }
}
