import "./not_there.mjs"; export default async () => {};
