interface Payload {
  count: number;
}

export default async (payload: Payload, helpers: { query: Function }): Promise<void> => {
  const doubled: number = payload.count * 2;
  await helpers.query("insert into noted (task, value) values ('typed', $1)", [JSON.stringify({ doubled })]);
};
